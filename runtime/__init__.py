"""The executor of DeltaFlash: loads an engine directory and generates tokens with it."""

from runtime._native import (
    CapacityError,
    CudaError,
    EngineError,
    EngineInfo,
    EngineLost,
    Executor,
    ExecutorConfig,
    FinishReason,
    IterationStats,
    LoadReport,
    OutputConfig,
    RepetitionLimits,
    Request,
    RequestStats,
    Response,
    SamplingConfig,
)

__all__ = [
    "CapacityError",
    "CudaError",
    "EngineError",
    "EngineInfo",
    "EngineLost",
    "Executor",
    "ExecutorConfig",
    "FinishReason",
    "IterationStats",
    "LoadReport",
    "OutputConfig",
    "RepetitionLimits",
    "Request",
    "RequestStats",
    "Response",
    "SamplingConfig",
]
