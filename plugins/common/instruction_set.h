#pragma once

#include <cstdint>
#include <string_view>

namespace deltaflash {

/// What the CPU twins are compiled for, besides the base instruction set of the architecture; on
/// x86-64 the levels v3 (AVX2, FMA) and v4 (AVX-512).
enum class InstructionSet : std::uint8_t { kBase, kAvx2, kAvx512 };

std::string_view name_of(InstructionSet set);  // "base", "avx2", "avx512"

/// The widest that this machine and this build have.
InstructionSet widest_instruction_set();

/// The one in use: the widest, unless it was set. Results are the same for every caller as long as
/// it stays; a narrower one may round otherwise.
InstructionSet instruction_set();

/// For tests and measurements, while no op runs. Throws std::invalid_argument for one that is wider
/// than the widest.
void set_instruction_set(InstructionSet set);

}  // namespace deltaflash
