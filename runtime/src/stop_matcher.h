#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace deltaflash {

/// Finds stop strings in a text that arrives in pieces. The result does not depend on where the
/// pieces are cut: the match that ends first in the text wins, and of those that end at the same
/// byte the longest. The text is cut right before the winner, right after it with `include_stop`.
///
/// Text is released as early as that allows. The longest end of the text that may yet turn into a
/// stop is held back, and released in full once it cannot. With `include_stop` nothing needs to be
/// held back, as the cut never falls before the newest byte.
///
/// An Aho-Corasick automaton (doi:10.1145/360825.360855): time is linear in the text whatever the
/// stops are, memory linear in the stops.
class StopMatcher {
 public:
  /// Throws std::invalid_argument for a stop that is empty or not UTF-8. Text that is valid UTF-8
  /// is then released as valid UTF-8: a stop begins and ends between two characters.
  StopMatcher(std::vector<std::string> stops, bool include_stop);

  /// Adds a piece and appends to `released` the text that can go out. Returns true if a stop has
  /// matched, in this piece or before; pieces after a match are ignored.
  bool push(std::string_view piece, std::string& released);

  /// The text has ended: releases what is held back, unless a stop has matched.
  void finish(std::string& released);

  /// The text that is held back, or the stop that has matched and is not part of the text.
  std::string_view held() const;

  /// The stop that matched.
  std::optional<std::string> matched_stop() const;

 private:
  // A node is a prefix of a stop, the root the empty one. 0 means none where a child is meant.
  struct Node {
    std::uint8_t byte = 0;   // the last of the prefix
    std::int32_t depth = 0;  // bytes in the prefix
    std::int32_t first_child = 0;
    std::int32_t next_sibling = 0;
    std::int32_t fail = 0;    // the longest proper suffix that is a node too
    std::int32_t stop = 0;    // a stop that begins with the prefix
    std::int32_t match = -1;  // the longest stop that the prefix ends with
  };

  void build(const std::vector<std::int32_t>& stop_indices);
  std::int32_t child(std::int32_t node, std::uint8_t byte) const;
  std::int32_t step(std::int32_t node, std::uint8_t byte) const;
  bool is_shadowed(const std::string& stop) const;

  std::vector<std::string> stops_;
  bool include_stop_;
  std::vector<Node> nodes_;
  std::array<std::int32_t, 256> root_children_{};
  std::int32_t node_ = 0;      // the longest end of the text that is a node
  std::int32_t matched_ = -1;  // index into stops_
};

}  // namespace deltaflash
