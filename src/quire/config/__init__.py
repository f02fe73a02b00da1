"""Configuration: wishes (`EngineArgs`) meet facts about model and machine, and become an
`EnginePlan`.

Standard library and msgspec only. Reading files and looking at the machine happens in
`quire.config.planning`.
"""
