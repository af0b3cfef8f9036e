"""The OpenAI-compatible proxy in front of a system's engines, which records their answers as experiences."""
