"""Write quantized checkpoints from calibration text: AWQ, GPTQ, SmoothQuant and plain rounding."""
