"""The ground: what the whole house stands on. Imports nothing else of it, and no framework."""
