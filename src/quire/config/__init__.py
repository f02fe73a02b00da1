"""Configuration: arguments (`EngineArgs`) and facts about model and machine become an `EnginePlan`.

Standard library and msgspec only. Reading files and inspecting the machine happens in
`quire.config.planning`.
"""
