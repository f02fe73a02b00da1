"""The messages that cross an executor: plans down, results up. Plain data without torch, so that a
step can be sent to another process, recorded and run again.
"""
