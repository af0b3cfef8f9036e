"""The OpenAI-compatible proxy before all engines of a system, which records what they answer."""
