"""Adapters for third-party trainers. Import only the module of your trainer, since it needs that trainer's package."""
