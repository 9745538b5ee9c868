"""Training and scoring of the nano model; needs torch (extra `train`)."""
