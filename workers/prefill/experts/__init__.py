"""The FFN of models with experts: a choice for each row, and grouped products with the experts as the monokernel has them."""
