"""Every key of the config as the system's processes use it: frozen sections, checked when they are made."""
