"""Planning: pure numbers. A model profile and a hardware become a plan; nothing here touches a
device."""
