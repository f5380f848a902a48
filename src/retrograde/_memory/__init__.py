"""Where saved tensors are: in a budget on the device, or in host memory."""
