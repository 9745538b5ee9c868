#include "runtime/src/request_checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "runtime/src/scheduler.h"

namespace deltaflash {
namespace {

/// Verify kernels take rows of up to 16 tokens.
constexpr std::int32_t kMaxDraftTokens = 15;
constexpr std::int32_t kMaxThreads = 1024;
constexpr std::int32_t kVisionTileStep = 16;  // patches: a multiple of those of a token
constexpr std::int64_t kDefaultKvTokensPerSlot = 4096;
constexpr std::int64_t kMaxKvTokens = std::numeric_limits<std::int32_t>::max();  // pages are int32

void check_id(const char* field, TokenId id, std::int64_t vocab_size) {
  if (id < 0 || id >= vocab_size) {
    refuse(field, "id " + std::to_string(id), "ids in [0, " + std::to_string(vocab_size) + ")");
  }
}

void check_ids(const char* field, const std::vector<TokenId>& ids, std::int64_t vocab_size) {
  for (const TokenId id : ids) {
    check_id(field, id, vocab_size);
  }
}

void check_sampling(const SamplingConfig& sampling, std::int64_t vocab_size) {
  if (!std::isfinite(sampling.temperature) || sampling.temperature < 0) {
    refuse("sampling.temperature", std::to_string(sampling.temperature), "a finite value >= 0");
  }
  if (sampling.top_k < 0) {
    refuse("sampling.top_k", std::to_string(sampling.top_k), "at least 0");
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    refuse("sampling.top_p", std::to_string(sampling.top_p), "a value in (0, 1]");
  }
  if (!(sampling.min_p >= 0 && sampling.min_p < 1)) {
    refuse("sampling.min_p", std::to_string(sampling.min_p), "a value in [0, 1)");
  }
  if (!std::isfinite(sampling.repetition_penalty) || sampling.repetition_penalty <= 0) {
    refuse("sampling.repetition_penalty", std::to_string(sampling.repetition_penalty),
           "a finite value > 0");
  }
  if (!std::isfinite(sampling.presence_penalty)) {
    refuse("sampling.presence_penalty", std::to_string(sampling.presence_penalty),
           "a finite value");
  }
  if (!std::isfinite(sampling.frequency_penalty)) {
    refuse("sampling.frequency_penalty", std::to_string(sampling.frequency_penalty),
           "a finite value");
  }
  if (sampling.logit_bias.size() > kMaxLogitBiases) {
    refuse("sampling.logit_bias", std::to_string(sampling.logit_bias.size()) + " ids",
           "at most " + std::to_string(kMaxLogitBiases));
  }
  for (const auto& [id, value] : sampling.logit_bias) {
    check_id("sampling.logit_bias", id, vocab_size);
    if (!std::isfinite(value)) {
      refuse("sampling.logit_bias", std::to_string(value) + " for id " + std::to_string(id),
             "finite values");
    }
  }
}

void check_images(const std::vector<Image>& images, const EngineInfo& engine) {
  if (!images.empty() && !engine.has_vision) {
    refuse("images", std::to_string(images.size()) + " pictures",
           "none: this engine on this device has no vision encoder");
  }
  for (std::size_t i = 0; i < images.size(); ++i) {
    const Image& image = images[i];
    const std::string field = "images[" + std::to_string(i) + "]";
    const std::string found =
        std::to_string(image.width) + " x " + std::to_string(image.height) + " pixels";
    if (image.height < 1 || image.width < 1 || image.height % engine.image_factor != 0 ||
        image.width % engine.image_factor != 0) {
      refuse(field, found, "multiples of " + std::to_string(engine.image_factor));
    }
    if (image.height > engine.max_image_pixels / image.width) {
      refuse(field, found,
             "at most " + std::to_string(engine.max_image_pixels) + " pixels (max_image_pixels)");
    }
    if (!image.pixels ||
        static_cast<std::int64_t>(image.pixels->size()) != 3 * image.height * image.width) {
      refuse(field, "other data than " + found, "3 bytes a pixel");
    }
  }
}

}  // namespace

void refuse(const std::string& field, const std::string& found, const std::string& expected) {
  throw std::invalid_argument(field + ": " + found + ", expected " + expected);
}

void check_config(const ExecutorConfig& config) {
  const auto at_least = [](const char* field, std::int64_t value, std::int64_t least) {
    if (value < least) {
      refuse(field, std::to_string(value), "at least " + std::to_string(least));
    }
  };
  at_least("max_batch_size", config.max_batch_size, 1);
  at_least("max_prefill_chunk", config.max_prefill_chunk, 1);
  at_least("max_queue_size", config.max_queue_size, 0);
  at_least("max_queued_tokens", config.max_queued_tokens, 1);
  at_least("kv_page_size", config.kv_page_size, 1);
  at_least("max_kv_tokens", config.max_kv_tokens, 0);
  at_least("default_max_tokens", config.default_max_tokens, 1);
  at_least("max_draft_tokens", config.max_draft_tokens, 0);
  at_least("num_threads", config.num_threads, 0);
  if (config.num_threads > kMaxThreads) {
    refuse("num_threads", std::to_string(config.num_threads),
           "at most " + std::to_string(kMaxThreads));
  }
  at_least("iter_stats_max_iterations", config.iter_stats_max_iterations, 0);
  at_least("max_scripted_tokens", config.max_scripted_tokens, 0);
  at_least("max_admission_passes", config.max_admission_passes, 0);
  if (config.max_rounds_in_flight < 1 || config.max_rounds_in_flight > 2) {
    refuse("max_rounds_in_flight", std::to_string(config.max_rounds_in_flight), "1 or 2");
  }
  if (config.max_draft_tokens > kMaxDraftTokens) {
    refuse("max_draft_tokens", std::to_string(config.max_draft_tokens),
           "at most " + std::to_string(kMaxDraftTokens));
  }
  at_least("max_image_pixels", config.max_image_pixels, 1);
  at_least("encoder_cache_bytes", config.encoder_cache_bytes, 0);
  if (config.max_vision_tile < kVisionTileStep || config.max_vision_tile % kVisionTileStep != 0) {
    refuse("max_vision_tile", std::to_string(config.max_vision_tile),
           "a positive multiple of " + std::to_string(kVisionTileStep));
  }
  const std::int64_t row = config.max_draft_tokens + std::int64_t{1};
  if (config.ring_history != 0 && config.ring_history < row) {
    refuse("ring_history", std::to_string(config.ring_history),
           "0 or at least max_draft_tokens + 1 = " + std::to_string(row));
  }
  // Prefill must go on while every slot decodes.
  const std::int64_t least = config.max_batch_size * row +
                             std::min<std::int64_t>(kPrefillAlignment, config.max_prefill_chunk);
  at_least("max_num_tokens", config.max_num_tokens, least);
}

std::int64_t pool_tokens(const ExecutorConfig& config, const ModelConfig& model) {
  const std::int64_t tokens =
      config.max_kv_tokens > 0
          ? config.max_kv_tokens
          : config.max_batch_size * std::min(model.context_len, kDefaultKvTokensPerSlot);
  if (tokens > kMaxKvTokens) {
    refuse("max_kv_tokens", std::to_string(tokens), "at most " + std::to_string(kMaxKvTokens));
  }
  return tokens;
}

void check_request(const Request& request, const ExecutorConfig& config, const EngineInfo& engine,
                   std::int64_t pool_room) {
  const auto num_prompt = static_cast<std::int64_t>(request.input_token_ids.size());
  if (num_prompt == 0) {
    refuse("input_token_ids", "empty", "at least one token");
  }
  check_ids("input_token_ids", request.input_token_ids, engine.vocab_size);
  check_images(request.images, engine);
  if (num_prompt >= engine.context_len) {
    refuse("input_token_ids", std::to_string(num_prompt) + " tokens",
           "fewer than the context of " + std::to_string(engine.context_len));
  }
  if (pool_room < 1) {
    refuse("input_token_ids", std::to_string(num_prompt) + " tokens",
           "at most " + std::to_string(num_prompt + pool_room - 1) +
               ", the room of the KV cache (max_kv_tokens)");
  }
  if (request.max_tokens && *request.max_tokens < 1) {
    refuse("max_tokens", std::to_string(*request.max_tokens), "at least 1");
  }
  if (request.max_tokens && *request.max_tokens > pool_room &&
      pool_room < engine.context_len - num_prompt) {
    refuse("max_tokens", std::to_string(*request.max_tokens),
           "at most " + std::to_string(pool_room) +
               " with this prompt, the room of the KV cache (max_kv_tokens)");
  }
  const std::int32_t longest = request.max_tokens.value_or(config.default_max_tokens);
  if (request.min_tokens < 0 || request.min_tokens > longest) {
    refuse("min_tokens", std::to_string(request.min_tokens),
           "0 to max_tokens = " + std::to_string(longest));
  }
  check_sampling(request.sampling, engine.vocab_size);
  check_ids("stop_ids", request.stop_ids, engine.vocab_size);
  const std::size_t num_end_ids =
      (request.ignore_end_ids ? 0 : request.end_ids.value_or(engine.end_ids).size()) +
      request.stop_ids.size();
  if (num_end_ids > kMaxEndIds) {
    refuse("end_ids, stop_ids", std::to_string(num_end_ids) + " ids",
           "at most " + std::to_string(kMaxEndIds) + " together");
  }
  if (const auto& count = request.output.top_logprobs) {
    const std::int64_t most = std::min<std::int64_t>(kMaxTopLogprobs, engine.vocab_size);
    if (*count < 0 || *count > most) {
      refuse("output.top_logprobs", std::to_string(*count), "0 to " + std::to_string(most));
    }
    if (!request.output.token_records) {
      refuse("output.top_logprobs", std::to_string(*count), "token_records with it");
    }
  }
  if (request.allotted_time_ms && *request.allotted_time_ms < 1) {
    refuse("allotted_time_ms", std::to_string(*request.allotted_time_ms), "at least 1");
  }
  const auto num_forced = static_cast<std::int64_t>(request.forced_tokens.size());
  const auto num_script = static_cast<std::int64_t>(request.draft_script.size());
  if (std::max(num_forced, num_script) > config.max_scripted_tokens) {
    refuse("forced_tokens, draft_script", std::to_string(std::max(num_forced, num_script)),
           "at most max_scripted_tokens = " + std::to_string(config.max_scripted_tokens));
  }
  if (request.fail_after_tokens < 0 || request.fail_after_tokens > config.max_scripted_tokens) {
    refuse("fail_after_tokens", std::to_string(request.fail_after_tokens),
           "at most max_scripted_tokens = " + std::to_string(config.max_scripted_tokens));
  }
  check_ids("forced_tokens", request.forced_tokens, engine.vocab_size);
}

}  // namespace deltaflash
