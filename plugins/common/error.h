#pragma once

#include <stdexcept>
#include <string>

namespace deltaflash {

/// No page, slot or queue place is left. gRPC: RESOURCE_EXHAUSTED.
class CapacityError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Engine directory, plugin or manifest disagree. The server does not start.
class EngineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A device call failed. gRPC: UNAVAILABLE.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The engine thread has ended; every request it held is failed. gRPC: UNAVAILABLE.
class EngineLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace deltaflash
