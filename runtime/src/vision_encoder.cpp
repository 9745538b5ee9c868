#include "runtime/src/vision_encoder.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "plugins/common/error.h"
#include "runtime/src/clock.h"

namespace deltaflash {
namespace {

constexpr std::int64_t kSmallTile = 16;  // patches; the least that a slice works on
// Costs follow measurements at this rate, so that one that was disturbed is soon forgotten.
constexpr double kCostRate = 0.3;

const VisionConfig& config_of(const Program& program) {
  if (!program.vision) {
    throw EngineError("the program has no vision step");
  }
  return *program.vision;
}

/// What tells stages of different cost apart: their ops, whatever the block.
std::string kind_of(const std::vector<OpSpec>& ops) {
  std::string kind;
  for (const OpSpec& op : ops) {
    kind += op.plugin + ";";
  }
  return kind;
}

}  // namespace

VisionEncoder::VisionEncoder(Device& device, ModelMemory& memory, const Program& program,
                             std::int64_t max_pixels, std::int64_t max_tile_rows)
    : device_(device),
      config_(config_of(program)),
      out_width_(program.config.hidden_size),
      max_tile_rows_(max_tile_rows) {
  allocate(program, memory, max_pixels / (config_.patch_size * config_.patch_size));
  std::map<std::string, std::size_t> kinds;
  for (const auto& ops : program.vision_stages) {
    Stage stage{.ops = {}, .cost = kinds.emplace(kind_of(ops), kinds.size()).first->second};
    for (const OpSpec& op : ops) {
      stage.ops.push_back(bind_vision_operator(op, memory, config_, device.plugins()));
    }
    stages_.push_back(std::move(stage));
  }
  costs_.resize(kinds.size());
}

template <typename T>
T* VisionEncoder::reserve(std::int64_t count) {
  const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
  reserved_bytes_ += static_cast<std::int64_t>(bytes);
  return static_cast<T*>(device_.allocate(bytes));
}

void VisionEncoder::allocate(const Program& program, ModelMemory& memory,
                             std::int64_t max_patches) {
  for (const auto& [name, spec] : program.buffers) {
    std::int64_t rows = 0;
    switch (spec.rows) {
      case RowKind::kTokens:
      case RowKind::kLogits:
        continue;  // the runner's
      case RowKind::kPatches:
        rows = max_patches;
        break;
      case RowKind::kPatchTile:
        rows = max_tile_rows_;
        break;
      case RowKind::kImageTokenTile:
        rows = max_tile_rows_ / config_.merged();
        break;
      case RowKind::kImageTokens:
        if (spec.width != out_width_) {
          throw EngineError("buffer " + name + " is " + std::to_string(spec.width) +
                            " wide, expected hidden_size = " + std::to_string(out_width_));
        }
        break;  // each picture's own
    }
    memory.buffers.emplace(name,
                           Buffer{rows > 0 ? reserve<float>(rows * spec.width) : nullptr, spec});
  }
  kv_ = {.keys = nullptr,
         .values = nullptr,
         .num_patches = max_patches,
         .num_heads = config_.num_heads,
         .head_dim = config_.head_dim()};
  kv_.keys = reserve<float>(kv_.key_count());
  kv_.values = reserve<float>(kv_.value_count());
  levels_ = reserve<float>(static_cast<std::int64_t>(config_.pixel_levels.size()));
  device_.upload(levels_, config_.pixel_levels.data(), config_.pixel_levels.size() * sizeof(float));
}

void VisionEncoder::begin(const Image& image) {
  image_ = image;
  const PatchGrid grid{.height = image.height / config_.patch_size,
                       .width = image.width / config_.patch_size,
                       .merge_size = config_.merge_size};
  if (const std::int64_t side = std::max(grid.height, grid.width); side > num_positions_) {
    angles_.resize(static_cast<std::size_t>(side * config_.head_dim() / 2));
    vision_rotary_angles(side, config_.head_dim(), config_.rotary_theta, angles_.data());
    num_positions_ = side;
  }
  // Attention costs a row the more the larger the picture is.
  const std::int64_t num_patches = grid.num_patches();
  if (cost_patches_ > 0 && num_patches > cost_patches_) {
    for (double& cost : costs_) {
      cost *= static_cast<double>(num_patches) / static_cast<double>(cost_patches_);
    }
  }
  cost_patches_ = num_patches;

  embeddings_ = std::make_shared<ImageEmbeddings>();
  embeddings_->num_tokens = num_patches / config_.merged();
  embeddings_->width = out_width_;
  embeddings_->values = std::make_unique_for_overwrite<float[]>(
      static_cast<std::size_t>(embeddings_->num_tokens * out_width_));
  VisionKv kv = kv_;
  kv.num_patches = num_patches;
  tile_ = {.pixels = image_.pixels->data(),
           .levels = levels_,
           .angles = angles_.data(),
           .kv = kv,
           .embeddings = embeddings_->values.get(),
           .grid = grid,
           .first_row = 0,
           .num_rows = 0};
  stage_ = 0;
}

std::shared_ptr<const ImageEmbeddings> VisionEncoder::advance(std::int64_t budget_ns) {
  const std::int64_t end = now_ns() + budget_ns;
  for (std::int64_t left = budget_ns; left > 0; left = end - now_ns()) {
    const std::int64_t rows = next_rows(left);
    if (rows == 0 && left < budget_ns) {
      break;  // what is left of the slice is too short for a tile
    }
    run_tile(rows);
    if (stage_ == stages_.size()) {
      auto done = std::move(embeddings_);
      abandon();
      return done;
    }
  }
  return nullptr;
}

std::int64_t VisionEncoder::next_rows(std::int64_t budget_ns) const {
  const std::int64_t left = tile_.grid.num_patches() - tile_.first_row;
  const double cost = costs_[stages_[stage_].cost];
  if (cost == 0) {
    return std::min(left, kSmallTile);
  }
  const double affordable = static_cast<double>(budget_ns) / cost;
  auto rows = static_cast<std::int64_t>(std::min(affordable, static_cast<double>(max_tile_rows_)));
  const std::int64_t multiple =
      rows >= VisionAttention::kQueryTile ? VisionAttention::kQueryTile : kSmallTile;
  if (rows < max_tile_rows_) {
    rows = rows / multiple * multiple;
  }
  return std::min(left, rows);
}

void VisionEncoder::run_tile(std::int64_t num_rows) {
  Stage& stage = stages_[stage_];
  const std::int64_t least =
      std::min({kSmallTile, max_tile_rows_, tile_.grid.num_patches() - tile_.first_row});
  tile_.num_rows = std::max(num_rows, least);
  const std::int64_t begin = now_ns();
  for (const VisionOperator& op : stage.ops) {
    op(tile_, device_.stream());
  }
  const double measured =
      static_cast<double>(now_ns() - begin) / static_cast<double>(tile_.num_rows);
  double& cost = costs_[stage.cost];
  cost = cost == 0 ? measured : cost + kCostRate * (measured - cost);
  tile_.first_row += tile_.num_rows;
  if (tile_.first_row == tile_.grid.num_patches()) {
    tile_.first_row = 0;
    ++stage_;
  }
}

double VisionEncoder::fraction() const {
  const double rows = static_cast<double>(tile_.first_row) /
                      static_cast<double>(std::max<std::int64_t>(1, tile_.grid.num_patches()));
  return (static_cast<double>(stage_) + rows) / static_cast<double>(stages_.size());
}

void VisionEncoder::abandon() {
  embeddings_.reset();
  image_ = {};
  tile_ = {};
}

}  // namespace deltaflash
