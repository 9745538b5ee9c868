#pragma once

#include <cstdint>
#include <type_traits>

namespace deltaflash {

/// Calls `body` with the first of the ascending constants that is at least `value`, or with the
/// last: std::integral_constant<int, N>{}.
template <int kFirst, int... kRest, typename Body>
void dispatch_at_least(std::int64_t value, const Body& body) {
  if constexpr (sizeof...(kRest) > 0) {
    if (value > kFirst) {
      dispatch_at_least<kRest...>(value, body);
      return;
    }
  }
  body(std::integral_constant<int, kFirst>{});
}

}  // namespace deltaflash
