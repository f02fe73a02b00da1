"""Operations across a request's tokens other than attention over keys and values: latent attention,
recurrent states, attention within prompts, sums of tokens.
"""
