"""From a model, settings and a memory budget to a plan of every pass, and from a plan to tasks.

``compiler`` applies the recipe. ``budget`` and ``tile_search`` find the largest units that keep the
budget, ``cost_model`` and ``simulate`` predict how long a pass of them takes, and ``task_graph``
lists its tasks.
"""
