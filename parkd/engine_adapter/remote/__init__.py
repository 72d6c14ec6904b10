"""Before any server with an OpenAI-style API. It computes and keeps state as it likes; nothing is parked here."""
