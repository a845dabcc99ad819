"""The only part that imports SGLang: its cache, its hooks, its routes, and the platform for plain CPUs."""
