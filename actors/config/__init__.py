"""All keys of the config as the system's processes use them: frozen sections, checked at their creation."""
