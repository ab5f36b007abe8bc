"""The layers in an order that hides what they send: `order.py`, and what it is made of."""
