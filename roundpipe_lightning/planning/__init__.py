"""Pure numbers: a model profile and a hardware become a plan.

Nothing in here imports a framework or touches a device.
"""
