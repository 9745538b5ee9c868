#include "plugins/common/instruction_set.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace deltaflash {
namespace {

InstructionSet detect() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) {
    return InstructionSet::kAvx512;
  }
  if (__builtin_cpu_supports("x86-64-v3")) {
    return InstructionSet::kAvx2;
  }
#endif
  return InstructionSet::kBase;
}

std::atomic<InstructionSet>& in_use() {
  static std::atomic<InstructionSet> set = widest_instruction_set();
  return set;
}

}  // namespace

std::string_view name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kBase:
      return "base";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
  }
  return "unknown";
}

InstructionSet widest_instruction_set() {
  static const InstructionSet kWidest = detect();
  return kWidest;
}

InstructionSet instruction_set() { return in_use().load(std::memory_order_relaxed); }

void set_instruction_set(InstructionSet set) {
  if (set > widest_instruction_set()) {
    throw std::invalid_argument("set_instruction_set: expected at most " +
                                std::string(name_of(widest_instruction_set())) +
                                ", the kWidest of this machine, got " + std::string(name_of(set)));
  }
  in_use().store(set, std::memory_order_relaxed);
}

}  // namespace deltaflash
