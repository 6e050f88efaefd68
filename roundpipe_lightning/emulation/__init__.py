"""Emulated devices and servers, and the checks they make; nothing else imports them."""
