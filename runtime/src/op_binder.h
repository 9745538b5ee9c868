#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/src/operators.h"
#include "runtime/src/program.h"

namespace deltaflash {

/// Looks things up for one op of the program and says which op missed what, as EngineError.
class OpBinder {
 public:
  OpBinder(const OpSpec& op, const ModelMemory& memory) : op_(op), memory_(memory) {}

  /// The buffer under `key`; its rows must be `width` elements wide, and be `rows`.
  const Buffer& buffer(const std::string& key, std::int64_t width,
                       RowKind rows = RowKind::kTokens) const;

  /// The same where an op knows strides: its rows may be wider.
  const Buffer& wide_buffer(const std::string& key, std::int64_t width,
                            RowKind rows = RowKind::kTokens) const;

  /// The buffer under `key`, whatever its rows.
  const Buffer& any_buffer(const std::string& key) const;

  bool has_buffer(const std::string& key) const { return op_.buffers.contains(key); }

  /// The data of the weight under `key`, checked for dtype and shape.
  template <typename T>
  const T* weight(const std::string& key, DType dtype,
                  const std::vector<std::int64_t>& shape) const {
    return static_cast<const T*>(weight_data(key, dtype, shape));
  }

  /// The attribute under `key`, which must be in [0, limit).
  std::int64_t attr(const std::string& key, std::int64_t limit) const;

  [[noreturn]] void fail(const std::string& what) const;

 private:
  const void* weight_data(const std::string& key, DType dtype,
                          const std::vector<std::int64_t>& shape) const;
  [[noreturn]] void fail_width(const std::string& key, std::int64_t width,
                               const Buffer& found) const;

  const OpSpec& op_;
  const ModelMemory& memory_;
};

}  // namespace deltaflash
