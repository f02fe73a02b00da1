"""Operations of mixers other than attention over keys and values: latent attention, recurrent
states.
"""
