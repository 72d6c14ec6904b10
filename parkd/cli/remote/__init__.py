"""Commands that speak to a running server: what it holds, why it read, what that cost."""
