#include "runtime/src/stop_matcher.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "runtime/src/utf8_decoder.h"

namespace deltaflash {

StopMatcher::StopMatcher(std::vector<std::string> stops, bool include_stop)
    : stops_(std::move(stops)), include_stop_(include_stop) {
  for (std::size_t i = 0; i < stops_.size(); ++i) {
    if (stops_[i].empty()) {
      throw std::invalid_argument("stop string " + std::to_string(i) + " is empty");
    }
    if (!is_valid_utf8(stops_[i])) {
      throw std::invalid_argument("stop string " + std::to_string(i) + " is not valid UTF-8");
    }
  }
  std::vector<std::int32_t> indices(stops_.size());
  std::iota(indices.begin(), indices.end(), 0);
  build(indices);
  // A stop within which another one ends can never win: text would be held back in vain. Without
  // those a node matches only as the end of its own stop.
  if (std::erase_if(indices, [&](std::int32_t index) {
        return is_shadowed(stops_[static_cast<std::size_t>(index)]);
      }) != 0) {
    build(indices);
  }
}

void StopMatcher::build(const std::vector<std::int32_t>& stop_indices) {
  nodes_.assign(1, Node{});
  root_children_.fill(0);
  for (const std::int32_t index : stop_indices) {
    std::int32_t node = 0;
    for (const char character : stops_[static_cast<std::size_t>(index)]) {
      const auto byte = static_cast<std::uint8_t>(character);
      std::int32_t next = child(node, byte);
      if (next == 0) {
        next = static_cast<std::int32_t>(nodes_.size());
        const Node& parent = nodes_[node];
        nodes_.push_back({.byte = byte,
                          .depth = parent.depth + 1,
                          .next_sibling = parent.first_child,
                          .stop = index});
        nodes_[node].first_child = next;
        if (node == 0) {
          root_children_[byte] = next;
        }
      }
      node = next;
    }
    if (nodes_[node].match < 0) {
      nodes_[node].match = index;
    }
  }

  // Breadth first: the longest proper suffix of a node lies less deep than the node.
  std::vector<std::int32_t> queue = {0};
  queue.reserve(nodes_.size());
  for (std::size_t head = 0; head < queue.size(); ++head) {
    const std::int32_t parent = queue[head];
    for (std::int32_t node = nodes_[parent].first_child; node != 0;
         node = nodes_[node].next_sibling) {
      nodes_[node].fail = parent == 0 ? 0 : step(nodes_[parent].fail, nodes_[node].byte);
      if (nodes_[node].match < 0) {
        nodes_[node].match = nodes_[nodes_[node].fail].match;
      }
      queue.push_back(node);
    }
  }
}

std::int32_t StopMatcher::child(std::int32_t node, std::uint8_t byte) const {
  if (node == 0) {
    return root_children_[byte];
  }
  std::int32_t child = nodes_[node].first_child;
  while (child != 0 && nodes_[child].byte != byte) {
    child = nodes_[child].next_sibling;
  }
  return child;
}

std::int32_t StopMatcher::step(std::int32_t node, std::uint8_t byte) const {
  std::int32_t next = child(node, byte);
  while (next == 0 && node != 0) {
    node = nodes_[node].fail;
    next = child(node, byte);
  }
  return next;
}

bool StopMatcher::is_shadowed(const std::string& stop) const {
  std::int32_t node = 0;
  for (std::size_t i = 0; i + 1 < stop.size(); ++i) {
    node = child(node, static_cast<std::uint8_t>(stop[i]));
    if (nodes_[node].match >= 0) {
      return true;
    }
  }
  return false;
}

std::string_view StopMatcher::held() const {
  if (include_stop_) {
    return {};
  }
  const Node& node = nodes_[node_];
  return node.depth == 0 ? std::string_view{}
                         : std::string_view(stops_[static_cast<std::size_t>(node.stop)])
                               .substr(0, static_cast<std::size_t>(node.depth));
}

bool StopMatcher::push(std::string_view piece, std::string& released) {
  if (matched_ >= 0) {
    return true;
  }
  const std::string_view before = held();
  std::size_t num_read = 0;
  while (num_read < piece.size() && matched_ < 0) {
    node_ = step(node_, static_cast<std::uint8_t>(piece[num_read]));
    matched_ = nodes_[node_].match;
    ++num_read;
  }

  // What is kept of before + piece[0, num_read). After a match that is the stop: no node lies below
  // one that matches, see the constructor.
  const std::size_t num_released = before.size() + num_read - held().size();
  const std::size_t from_before = std::min(num_released, before.size());
  released.append(before.substr(0, from_before));
  released.append(piece.substr(0, num_released - from_before));
  return matched_ >= 0;
}

void StopMatcher::finish(std::string& released) {
  if (matched_ < 0) {
    released.append(held());
    node_ = 0;
  }
}

std::optional<std::string> StopMatcher::matched_stop() const {
  if (matched_ < 0) {
    return std::nullopt;
  }
  return stops_[static_cast<std::size_t>(matched_)];
}

}  // namespace deltaflash
