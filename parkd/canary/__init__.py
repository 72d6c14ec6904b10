"""The canary: whether a model's state really comes back as it left, tried out before conversations depend on it."""
