"""Where PyTorch hands over what it saves for backward, and asks for it again."""
