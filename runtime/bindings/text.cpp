#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/bindings/bindings.h"
#include "runtime/src/detokenizer.h"
#include "runtime/src/stop_matcher.h"
#include "runtime/src/text_stream.h"
#include "runtime/src/vocabulary.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace deltaflash {

namespace {

Vocabulary from_tokens(const std::vector<nb::bytes>& tokens,
                       const std::vector<std::int32_t>& special_ids,
                       const std::vector<std::int32_t>& unused_ids) {
  std::vector<std::string> copies;
  copies.reserve(tokens.size());
  for (const nb::bytes& token : tokens) {
    copies.emplace_back(static_cast<const char*>(token.data()), token.size());
  }
  const nb::gil_scoped_release release;
  return Vocabulary::from_tokens(copies, special_ids, unused_ids);
}

void bind_vocabulary(nb::module_& module) {
  nb::class_<Vocabulary>(module, "Vocabulary",
                         "What the token ids of a model stand for: a table id -> bytes.")
      .def(nb::init<const std::filesystem::path&>(), "path"_a,
           nb::sig("def __init__(self, path: str | os.PathLike[str]) -> None"),
           nb::call_guard<nb::gil_scoped_release>(),
           R"(Reads `vocab.bin` of an engine directory.

Args:
    path: The file; `runtime.vocabulary.write_vocabulary` writes it.

Raises:
    EngineError: The file cannot be read, or is not a vocabulary.)")
      .def_static("from_tokens", &from_tokens, "tokens"_a,
                  "special_ids"_a = std::vector<std::int32_t>{},
                  "unused_ids"_a = std::vector<std::int32_t>{},
                  R"(Makes a table without a file.

Args:
    tokens: The bytes of each id.
    special_ids: Ids of control tokens.
    unused_ids: Ids that no token owns; their bytes are empty.

Raises:
    ValueError: An id is out of range, or an unused one has bytes.)")
      .def("__len__", &Vocabulary::size)
      .def(
          "token_bytes",
          [](const Vocabulary& vocabulary, std::int32_t id) {
            const std::string_view bytes = vocabulary.bytes(id);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "token_id"_a, "Returns the bytes of a token; empty if it is unused or out of range.")
      .def("is_special", &Vocabulary::is_special, "token_id"_a,
           "Returns whether the token is a control token.")
      .def("is_unused", &Vocabulary::is_unused, "token_id"_a,
           "Returns whether no token has this id.");
}

void bind_detokenizer(nb::module_& module) {
  nb::class_<Detokenizer>(module, "Detokenizer",
                          R"(The text of one sequence, token by token.

Joined, the returned texts are the bytes of the shown tokens put together and decoded as UTF-8
with `errors="replace"`. Each of them is whole characters. Not for use by two threads at a time.)")
      .def(nb::init<const Vocabulary&, bool>(), "vocabulary"_a, nb::kw_only(),
           "skip_special_tokens"_a = true, nb::keep_alive<1, 2>(),
           R"(Starts an empty sequence.

Args:
    vocabulary: The bytes of the tokens.
    skip_special_tokens: Leave control tokens out of the text, as if they had not been there.)")
      .def(
          "append",
          [](Detokenizer& detokenizer, std::int32_t id) {
            std::string text;
            detokenizer.append(id, text);
            return text;
          },
          "token_id"_a, "Adds one token and returns the text that is certain with it.")
      .def(
          "finish",
          [](Detokenizer& detokenizer) {
            std::string text;
            detokenizer.finish(text);
            return text;
          },
          "Ends the sequence and returns U+FFFD for an incomplete character.");
}

void bind_stop_matcher(nb::module_& module) {
  nb::class_<StopMatcher>(module, "StopMatcher",
                          R"(Finds stop strings in a text that arrives in pieces.

The match that ends first in the text wins, and of those that end at the same byte the longest,
wherever the pieces are cut. Not for use by two threads at a time.)")
      .def(nb::init<std::vector<std::string>, bool>(), "stops"_a, nb::kw_only(),
           "include_stop"_a = false, nb::call_guard<nb::gil_scoped_release>(),
           R"(Starts an empty text.

Args:
    stops: The stop strings.
    include_stop: Cut the text right after the stop instead of right before it.

Raises:
    ValueError: A stop string is empty.)")
      .def(
          "push",
          [](StopMatcher& matcher, std::string_view text) {
            std::string released;
            matcher.push(text, released);
            return std::pair(std::move(released), matcher.matched_stop());
          },
          "text"_a, nb::call_guard<nb::gil_scoped_release>(),
          R"(Adds a piece of text; pieces after a match are ignored.

Args:
    text: The piece.

Returns:
    The text that can go out, and the stop that has matched or None.)")
      .def(
          "finish",
          [](StopMatcher& matcher) {
            std::string released;
            matcher.finish(released);
            return released;
          },
          "Ends the text and returns what was held back, nothing after a match.")
      .def_prop_ro("matched_stop", &StopMatcher::matched_stop, "The stop that matched, or None.");
}

void bind_text_stream(nb::module_& module) {
  nb::class_<TextStream>(module, "TextStream",
                         R"(The text of one sequence: decodes its tokens and looks for stop strings.

Text, token count and stop agree on the token that ended the sequence. Not for use by two threads
at a time.)")
      .def(
          "__init__",
          [](TextStream* self, const Vocabulary& vocabulary, std::vector<std::string> stops,
             bool include_stop, bool skip_special_tokens, std::int64_t min_tokens) {
            new (self) TextStream(vocabulary, {.stops = std::move(stops),
                                               .include_stop = include_stop,
                                               .skip_special_tokens = skip_special_tokens,
                                               .min_tokens = min_tokens});
          },
          "vocabulary"_a, nb::kw_only(), "stops"_a = std::vector<std::string>{},
          "include_stop"_a = false, "skip_special_tokens"_a = true, "min_tokens"_a = 0,
          nb::keep_alive<1, 2>(), nb::call_guard<nb::gil_scoped_release>(),
          R"(Starts an empty sequence.

Args:
    vocabulary: The bytes of the tokens.
    stops: Stop strings.
    include_stop: End the text right after the stop instead of right before it.
    skip_special_tokens: Leave control tokens out of the text.
    min_tokens: A stop string counts only in the text that comes after so many tokens.

Raises:
    ValueError: A stop string is empty.)")
      .def("push", &TextStream::push, "token_id"_a,
           R"(Adds one token; those after a stop are neither decoded nor counted.

Args:
    token_id: The token.

Returns:
    Whether a stop string is complete, with this token or before.)")
      .def("finish", &TextStream::finish,
           R"(Ends the sequence for another reason and releases what was held back.

Returns:
    Whether a stop string is complete.)")
      .def("take_text", &TextStream::take_text, "Returns the text released since the last call.")
      .def_prop_ro("num_tokens", &TextStream::num_tokens,
                   "Tokens pushed, up to and with the one that completed the stop string.")
      .def_prop_ro("num_tokens_released", &TextStream::num_tokens_released,
                   "Of these, how many have had all of their text released: the first ones.")
      .def_prop_ro("stopped", &TextStream::stopped, "Whether a stop string is complete.")
      .def_prop_ro("matched_stop", &TextStream::matched_stop,
                   "The stop string that ended the sequence, or None.");
}

}  // namespace

void bind_text(nb::module_& module) {
  bind_vocabulary(module);
  bind_detokenizer(module);
  bind_stop_matcher(module);
  bind_text_stream(module);
}

}  // namespace deltaflash
