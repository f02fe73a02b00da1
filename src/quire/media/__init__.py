"""Pictures on their way into a prompt: fetched, decoded, processed and named by their content.

Nothing here knows the engine, the server or a model. A front end takes what comes out of it: arrays
for the encoder, a digest, and where in the prompt the encoder's rows go.
"""
