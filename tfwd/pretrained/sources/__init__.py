"""Files of weights under one interface: safetensors, `.npz` and TensorFlow checkpoints."""
