"""Tables with rows in a single tensor: floating-point values, or codes with a scale and a bias."""
