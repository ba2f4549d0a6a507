"""Mathematics of recurrent layers on trees of tokens: pure functions of tensors."""
