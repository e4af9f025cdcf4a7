"""KCCL: symmetric heap, mailboxes and the reductions that ranks exchange through them."""
