"""The engine: the gradients of many victims in one batched pass, wherever the model allows it."""
