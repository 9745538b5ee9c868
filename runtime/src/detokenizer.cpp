#include "runtime/src/detokenizer.h"

namespace deltaflash {

void Detokenizer::append(std::int32_t id, std::string& out) { decoder_.append(piece(id), out); }

}  // namespace deltaflash
