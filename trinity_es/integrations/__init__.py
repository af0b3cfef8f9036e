"""Third-party trainers on our engines. Import only the module of your trainer: it needs that trainer's package."""
