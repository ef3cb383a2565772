"""Turns a model, settings and a memory budget into a plan of every pass, and a plan into tasks.

``recipe`` lists the transforms that make a pass of a model, and ``compiler`` cuts what they make.
``tile_search`` finds the largest units that fit, ``budget`` chooses among them by the seconds that
``simulate`` predicts from rates of this machine (``calibrate`` measures them, ``cost_model`` uses
them), and ``task_graph`` lists the tasks of a pass in order.
"""
