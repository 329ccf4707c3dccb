"""The server: FedAvg, with a spy around it that keeps what each client sends."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from gradveil.federated import Screen, Spy
from quickstart.task import Net, make, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; the spy's files of round 1 lie in the folder that the setting `spy` names."""
    strategy = FedAvg(fraction_evaluate=0.0)
    spied = Spy(Screen(strategy), rounds=[1], out=str(context.run_config["spy"]))
    result = spied.start(
        grid=grid,
        initial_arrays=ArrayRecord(make().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    print(f"accuracy {result.evaluate_metrics_serverapp}")  # noqa: T201


def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy of the global model."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test(model)})
