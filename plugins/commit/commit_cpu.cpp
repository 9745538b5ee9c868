#include <bit>
#include <stdexcept>
#include <string>

#include "plugins/commit/commit.h"

namespace deltaflash::cpu {

void commit_round(const CommitRound& args, Stream /*stream*/) {
  if (args.ring_rows <= 0 || !std::has_single_bit(static_cast<std::uint64_t>(args.ring_rows))) {
    throw std::invalid_argument("commit_round: expected ring_rows to be a power of two, got " +
                                std::to_string(args.ring_rows));
  }
  for (std::int64_t row = 0; row < args.rows.num_rows; ++row) {
    commit_row(args, row);
  }
}

}  // namespace deltaflash::cpu
