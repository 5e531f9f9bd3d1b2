"""From logits to tokens: the requests' sampling state, adjusting, choosing, verifying drafts, logprobs."""
