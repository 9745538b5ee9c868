#pragma once

#include <cstdlib>
#include <iostream>

/// Ends the program with the place and the condition unless it holds, whatever the build type.
#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::cerr << __FILE__ << ":" << __LINE__ << ": does not hold: " << #condition << "\n"; \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
