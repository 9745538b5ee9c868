"""The gRPC service of DeltaFlash: validation, tokenisation, streaming, health, command line."""

VERSION = "0.1.0"
