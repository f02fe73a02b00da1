"""What engine cores do together: the group that they exchange bytes in, and the experts that they
share.
"""
