#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/src/device.h"
#include "runtime/src/image.h"
#include "runtime/src/operators.h"
#include "runtime/src/vision_operators.h"

namespace deltaflash {

/// Runs the vision step on one picture at a time, in slices: its place is a stage and a row, and no
/// bit of the result depends on where the slices end. Needs a device whose launches return when
/// they are done. One thread uses an encoder.
class VisionEncoder {
 public:
  /// Binds the stages and reserves memory for the largest picture; pages of it are first touched by
  /// a picture that needs them. `memory` holds the weights and segments, and gets the buffers.
  /// `max_tile_rows`, patches, is a multiple of the patches of a token.
  /// Throws EngineError if program, weights and device do not fit.
  VisionEncoder(Device& device, ModelMemory& memory, const Program& program,
                std::int64_t max_pixels, std::int64_t max_tile_rows);

  const VisionConfig& config() const { return config_; }
  std::int64_t reserved_bytes() const { return reserved_bytes_; }

  /// Starts a picture, whose size has been checked, in place of the one in work if there is one.
  void begin(const Image& image);

  /// Whether a picture is in work.
  bool busy() const { return embeddings_ != nullptr; }

  /// Works for about `budget_ns`, and on one small tile of rows at least. Returns the result once
  /// the picture is done, null before.
  std::shared_ptr<const ImageEmbeddings> advance(std::int64_t budget_ns);

  /// How much of the picture in work is done, 0 to 1.
  double fraction() const;

  /// Gives up the picture in work.
  void abandon();

 private:
  struct Stage {
    std::vector<VisionOperator> ops;
    std::size_t cost;  // index into costs_: stages of the same ops share one
  };

  void allocate(const Program& program, ModelMemory& memory, std::int64_t max_patches);
  template <typename T>
  T* reserve(std::int64_t count);
  std::int64_t next_rows(std::int64_t budget_ns) const;
  void run_tile(std::int64_t num_rows);

  Device& device_;
  VisionConfig config_;
  std::int64_t out_width_;
  std::int64_t max_tile_rows_;
  std::int64_t reserved_bytes_ = 0;
  float* levels_ = nullptr;
  VisionKv kv_{};  // of the largest picture
  std::vector<Stage> stages_;
  std::vector<double> costs_;       // ns a row as last measured, 0 = not yet
  std::int64_t cost_patches_ = 0;   // of the picture that `costs_` was measured with
  std::vector<float> angles_;       // of the longest side so far
  std::int64_t num_positions_ = 0;  // in `angles_`

  // The picture in work.
  std::shared_ptr<ImageEmbeddings> embeddings_;
  Image image_;
  VisionTile tile_{};
  std::size_t stage_ = 0;
};

}  // namespace deltaflash
