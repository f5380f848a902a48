"""Other libraries' models and loops. Each file needs the library that it is named after; nothing below imports them."""
