#pragma once

#include <cstdint>

namespace deltaflash {

/// How much other work the loop does between two verify rounds, so that running streams keep their
/// pace: about as much time as a round takes. Learns from measured times; one thread uses it.
class Pace {
 public:
  /// A verify round took `ns`.
  void round_took(std::int64_t ns);

  /// A prefill of `num_tokens` took `ns`.
  void prefill_took(std::int64_t num_tokens, std::int64_t ns);

  /// Time for one slice of other work.
  std::int64_t slice_ns() const;

  /// Prompt tokens that fit into a slice: a positive multiple of `alignment`.
  std::int64_t prefill_tokens(std::int64_t alignment) const;

  /// Whether it is the encoder's turn where prompts are ready too: they take turns.
  bool take_vision_turn() { return vision_turn_ = !vision_turn_; }

 private:
  double round_ns_ = 0;          // recent
  double prefill_token_ns_ = 0;  // recent, 0 = not yet measured
  bool vision_turn_ = false;
};

}  // namespace deltaflash
