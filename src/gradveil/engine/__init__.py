"""The engine: the gradients of many victims at once, in one batched pass wherever the model allows it."""
