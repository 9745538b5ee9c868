#include "runtime/src/op_binder.h"

#include "plugins/common/error.h"

namespace deltaflash {
namespace {

std::string describe(DType dtype, const std::vector<std::int64_t>& shape) {
  std::string text = std::string(name_of(dtype)) + " [";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

const Buffer& OpBinder::buffer(const std::string& key, std::int64_t width, RowKind rows) const {
  const Buffer& found = wide_buffer(key, width, rows);
  if (found.spec.width != width) {
    fail_width(key, width, found);
  }
  return found;
}

const Buffer& OpBinder::wide_buffer(const std::string& key, std::int64_t width,
                                    RowKind rows) const {
  const Buffer& found = any_buffer(key);
  if (found.spec.width < width) {
    fail_width(key, width, found);
  }
  if (found.spec.rows != rows) {
    fail("needs rows of " + std::string(name_of(rows)) + " in its buffer \"" + key + "\"");
  }
  return found;
}

const Buffer& OpBinder::any_buffer(const std::string& key) const {
  const auto name = op_.buffers.find(key);
  if (name == op_.buffers.end()) {
    fail("has no buffer \"" + key + "\"");
  }
  const auto found = memory_.buffers.find(name->second);
  if (found == memory_.buffers.end()) {
    fail("uses buffer \"" + name->second + "\", which the program does not declare");
  }
  return found->second;
}

std::int64_t OpBinder::attr(const std::string& key, std::int64_t limit) const {
  const auto found = op_.attrs.find(key);
  if (found == op_.attrs.end()) {
    fail("has no attribute \"" + key + "\"");
  }
  if (found->second < 0 || found->second >= limit) {
    fail("attribute \"" + key + "\" is " + std::to_string(found->second) + ", expected 0.." +
         std::to_string(limit - 1));
  }
  return found->second;
}

void OpBinder::fail(const std::string& what) const {
  throw EngineError("program op " + op_.name() + " " + what);
}

const void* OpBinder::weight_data(const std::string& key, DType dtype,
                                  const std::vector<std::int64_t>& shape) const {
  const auto name = op_.weights.find(key);
  if (name == op_.weights.end()) {
    fail("has no weight \"" + key + "\"");
  }
  const auto found = memory_.weights.find(name->second);
  if (found == memory_.weights.end()) {
    fail("uses weight \"" + name->second + "\", which the engine does not hold");
  }
  if (found->second.dtype != dtype || found->second.shape != shape) {
    fail("weight \"" + name->second + "\" is " +
         describe(found->second.dtype, found->second.shape) + ", expected " +
         describe(dtype, shape));
  }
  return found->second.data;
}

void OpBinder::fail_width(const std::string& key, std::int64_t width, const Buffer& found) const {
  fail("needs " + std::to_string(width) + " columns of buffer \"" + op_.buffers.at(key) +
       "\", found " + std::to_string(found.spec.width));
}

}  // namespace deltaflash
